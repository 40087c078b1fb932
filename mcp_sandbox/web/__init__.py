"""The web tools' side of the product: settings become providers, answers become views."""
