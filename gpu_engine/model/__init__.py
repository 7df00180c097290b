"""The target model: loading it, its attention over the paged cache, its linear layers. Nothing here knows requests."""
