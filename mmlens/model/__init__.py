"""A vision-language model whose insides have names."""
