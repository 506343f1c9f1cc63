"""The Gaussian process: features, kernels, inducing points, the sparse process."""
