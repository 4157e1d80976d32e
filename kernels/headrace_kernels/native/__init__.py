"""The C++ side: how it is compiled, loaded, and called."""
