"""What production's decisions do on made-up traces, without an engine. `python -m serve_app.simulation` prints the tables."""
