"""State machines of a broker: producer state, partition log, transaction and group coordinators, offsets.

`decide_*()` returns what is to be logged and answered and changes nothing; `replay_*()` applies it, live and on
recovery alike, so that recovery cannot differ. No clock, no socket, no file, no thread: values in, values out.
"""
