"""What is known about a user's model, and what running it touches. Nothing here knows ranks or a strategy.

trunk.py            the list of blocks at which a model is cut, or two
call_order.py       which modules are called before, between and after them
shared_state.py     what modules write outside of themselves
drawn.py            which random numbers a process has drawn
keys.py             keys that transformers' models keep of a forward
caches.py           results that functools.lru_cache must not keep from a run without data
modes.py            torch's modes, and copies that run on the side
norms.py            layers whose result for one row depends on the other rows
config_view.py      a configuration as one module sees it
"""
