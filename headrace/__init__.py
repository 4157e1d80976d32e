"""Headrace: the contract between producers, workers and gateways, and what a client needs."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 1
