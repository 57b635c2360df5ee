//! The DeepSeek V4 model on CPU and CUDA.
