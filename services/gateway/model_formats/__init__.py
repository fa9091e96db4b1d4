"""The forms in which models call tools and reason, each a small parser behind one interface."""
