"""Reading a checkpoint's folder into a model."""
