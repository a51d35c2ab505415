"""The lab's machines: scenarios, guests under QEMU, results."""
