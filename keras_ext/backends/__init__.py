"""What must know one backend, or a name that Keras keeps private; nothing else in the room does.

`internals` holds every private name, so that a new Keras release breaks one file and one test.
"""
