"""The type checker that conftest.py puts on every function of psearch_jax during tests."""

from beartype import BeartypeConf, beartype

# The numeric tower lets an int stand where a float is asked for, as every type checker does.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
