"""One request's life in the router: choices, legs to workers, deadlines, and the answer."""
