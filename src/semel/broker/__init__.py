"""The embedded broker: asyncio around `core`. Light to import: neither NumPy nor Arrow, until records must be decoded."""
