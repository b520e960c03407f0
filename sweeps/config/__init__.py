"""What is asked: dataclasses, strict building, axes and limits. Knows no Hydra."""
