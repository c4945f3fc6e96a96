"""Our own operators where torch's are slow for inference on a CPU."""
