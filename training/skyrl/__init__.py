"""The way to SkyRL: its environment interface over our maze, and the tickets that its data sets are made of."""
