"""Steps of native engines that share experts, where decoding is recorded as CUDA graphs."""
