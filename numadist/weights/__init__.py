"""Where weights come from: files of several formats, read by slices, and models without memory."""
