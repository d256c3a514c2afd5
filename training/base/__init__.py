"""The maze base: a vision-language model of the Qwen3-VL architecture that sees mazes well and walks them badly."""
