"""The verification rules, a file each. Every file here is imported, and registers its rule."""
