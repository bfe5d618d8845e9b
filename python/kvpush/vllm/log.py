"""Loggers below vLLM's own, so that lines appear in its log with its format and level."""

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger of one module of the adapter."""
    return logging.getLogger(f"vllm.kvpush.{name}")
