"""A checkpoint, loaded: its KV blocks, and the step that feeds tokens and returns rows of logits.
`open.py` is the only place that chooses between the CPU's and the GPU's engine.
"""
