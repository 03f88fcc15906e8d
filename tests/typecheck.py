"""The type checker of the tests: beartype, an int being a float as everywhere in Python's typing."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
