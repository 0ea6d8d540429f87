"""Rows, ms-swift arguments, supervision of torchrun, GRPO's plugins, serving and statistics. Imports neither Prefect nor, at import time, torch."""
