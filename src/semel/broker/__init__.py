"""The embedded broker: asyncio around `core`. Light to import: no Arrow before records are decoded."""
