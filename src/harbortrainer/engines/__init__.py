import logging

# peft imports bitsandbytes if it is installed, which then warns about kernels that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
