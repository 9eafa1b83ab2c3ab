"""python -m pycomm.status: what the ranks on this host are in, while they run or hang. See docs/trace.md.

It reads pages that the ranks' processes keep (csrc/transport/status_page.h) through /proc, of the own user
only, and changes nothing.
"""
