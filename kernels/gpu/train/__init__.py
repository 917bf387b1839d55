"""What training needs beside the serving kernels: forwards that keep what their backward reads, and the backwards."""
