"""The slot daemon: clients' sessions over one engine, their verbs and the frames that answer them."""
