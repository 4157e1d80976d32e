"""Headrace's kernels: each operation in its own folder, beside its reference in plain torch."""

from .dispatch import Backend, BackendError, backend, resolve, set_threads

__all__ = ["Backend", "BackendError", "backend", "resolve", "set_threads"]
