"""Files of prompts as requests: reading, running, comparing, writing."""
