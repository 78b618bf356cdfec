"""Networks for pictures from folders in Hugging Face's form, by the library transformers."""
