# SPDX-License-Identifier: Apache-2.0
"""Import template: a process that has done a program's imports and nothing else; programs are forked from it.

A fork costs milliseconds where an interpreter and its imports cost seconds.  The child becomes the program
that it was forked for: its arguments, environment, streams, ``__main__`` and command line are those of a
process that was started the ordinary way.  A fork is refused, with the reason, wherever that cannot be
shown, and the caller starts the program the ordinary way.

    record    which modules a program imports, written down while it imports them
    safety    what an import did that a fork must not copy: threads, descriptors, values of variables
    draws     what an import drew from chance, the clock or its process, which each rank must have for itself
    server    the template process: imports, checks, forks
    program   what a forked child does to become its program
    client    the owner's side: start a template, ask it for processes

Everything here needs the standard library only.
"""
