"""The floors: the least a Python process can do to answer a v2 identity request, one module a stack."""
