"""From a rank's graph to fast kernels: linear layers, attention, packing, freezing, recorded steps."""
