//! What a container runtime and a CNI plugin say to each other, versions 0.1.0 to 1.1.0.
