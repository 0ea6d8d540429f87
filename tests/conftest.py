"""Ctrl-C reaches what the tests start, also where the tests run in the background of a script, whose shell makes them ignore it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the default again in every program that is started
