"""Reading a checkpoint's folder: its configuration, its tensors, its quantization, and whether
there is room.
"""
