"""Files: foreign ones read behind one guard, own ones written whole or not at all."""
