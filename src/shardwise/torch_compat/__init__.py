"""Every private or version-dependent use of torch, by subject: the reason, and the versions it was seen on.

Where a file says nothing else, it was seen on torch 2.11 to 2.13.
"""
