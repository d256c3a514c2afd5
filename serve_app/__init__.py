"""Everything that knows Ray, and serves with vLLM: settings, app builder, ingress, replica, engine slots."""
