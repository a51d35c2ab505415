//! The kubelet's gRPC contracts, generated from `api/*.proto`, with clients of PodResources and of the
//! container runtime.
//!
//! Package names are on the wire (`/v1beta1.Registration/Register`), so the
//! proto packages keep the kubelet's names; the modules here name the contract.

#![warn(missing_docs)]

pub mod client;
pub mod runtime;

/// Device plugin API, the only version the kubelet accepts.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::doc_markdown,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files carry the documentation"
)]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");

    /// The version string of every `RegisterRequest`.
    pub const VERSION: &str = "v1beta1";
    /// File name of the kubelet's registration socket in the device-plugins directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
    /// [`Device::health`] of a device that may be allocated.
    pub const HEALTHY: &str = "Healthy";
    /// [`Device::health`] of a device that exists but may not be allocated.
    pub const UNHEALTHY: &str = "Unhealthy";
}

/// Plugin watcher registration.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::doc_markdown,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files carry the documentation"
)]
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// PodResources API: which container holds which devices.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::doc_markdown,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files carry the documentation"
)]
pub mod podresources {
    tonic::include_proto!("v1");
}

/// tonic's errors say "transport error"; what happened is at the end of the chain.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
