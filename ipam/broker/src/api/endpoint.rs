//! Where the API is, and as whom the broker speaks to it: the service account of its pod or, in
//! tests, a kubeconfig.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Uri;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::Value;

/// Where the kubelet puts the service account's files.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Why it is not known where the API is.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// There is no service account.
    #[error(
        "no Kubernetes API: {what}; run this program in a pod that has a service account's token"
    )]
    NotInCluster { what: String },
    /// A file cannot be read, or is not what it should be.
    #[error("read from {} how to reach the Kubernetes API: {why}", path.display())]
    File { path: PathBuf, why: String },
}

/// The API's address, its authority, and our credentials.
pub struct Endpoint {
    /// `https://HOST:PORT`, perhaps with a path.
    pub base: Uri,
    /// The namespace of the service account.
    pub namespace: Option<String>,
    /// Whose certificates the server's may be signed by.
    pub authorities: Vec<CertificateDer<'static>>,
    /// A client certificate with its key.
    pub certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    /// File of the bearer token, which is replaced before the token ends.
    pub token: Option<PathBuf>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// That of the pod that this program runs in: `variable` reads its environment, `directory` is
    /// [`SERVICE_ACCOUNT_DIR`].
    ///
    /// # Errors
    /// [`EndpointError`]: it runs in none, or without a token.
    pub fn in_cluster(
        variable: impl Fn(&str) -> Option<String>,
        directory: &Path,
    ) -> Result<Self, EndpointError> {
        let get = |name: &str| {
            variable(name).ok_or_else(|| EndpointError::NotInCluster {
                what: format!("{name} is not set"),
            })
        };
        let host = get("KUBERNETES_SERVICE_HOST")?;
        let port = get("KUBERNETES_SERVICE_PORT")?;
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host,
        };
        let base = format!("https://{host}:{port}");
        let base = base.parse().map_err(|_| EndpointError::NotInCluster {
            what: format!(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT make no address: {base}"
            ),
        })?;
        let token = directory.join("token");
        read(&token)?;
        let authorities = directory.join("ca.crt");
        Ok(Self {
            base,
            namespace: std::fs::read_to_string(directory.join("namespace"))
                .ok()
                .map(|namespace| namespace.trim().to_owned())
                .filter(|namespace| !namespace.is_empty()),
            authorities: certificates(&authorities, &read(&authorities)?)?,
            certificate: None,
            token: Some(token),
        })
    }

    /// That of the first cluster and user of a kubeconfig, in JSON, with its certificates in it.
    ///
    /// # Errors
    /// [`EndpointError`]: it cannot be read, or has no such key.
    pub fn of_kubeconfig(path: &Path) -> Result<Self, EndpointError> {
        let wrong = |why: String| EndpointError::File {
            path: path.to_owned(),
            why,
        };
        let config: Value =
            serde_json::from_slice(&read(path)?).map_err(|error| wrong(error.to_string()))?;
        let text = |key: &str| {
            let value = config.pointer(key).and_then(Value::as_str);
            value.ok_or_else(|| wrong(format!("it has no {key}")))
        };
        let pem = |key: &str| {
            let decoded = BASE64_STANDARD.decode(text(key)?);
            decoded.map_err(|error| wrong(format!("{key} is not base64: {error}")))
        };
        let server = text("/clusters/0/cluster/server")?;
        let authorities = pem("/clusters/0/cluster/certificate-authority-data")?;
        let chain = pem("/users/0/user/client-certificate-data")?;
        let key = PrivateKeyDer::from_pem_slice(&pem("/users/0/user/client-key-data")?)
            .map_err(|error| wrong(format!("it has no private key: {error}")))?;
        Ok(Self {
            base: server
                .parse()
                .map_err(|_| wrong(format!("{server:?} is not an address")))?,
            namespace: None,
            authorities: certificates(path, &authorities)?,
            certificate: Some((certificates(path, &chain)?, key)),
            token: None,
        })
    }
}

fn certificates(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, EndpointError> {
    let wrong = |why| EndpointError::File {
        path: path.to_owned(),
        why,
    };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|error| wrong(format!("it has no certificate: {error}")))?;
    match found.is_empty() {
        true => Err(wrong("it has no certificate".to_owned())),
        false => Ok(found),
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, EndpointError> {
    std::fs::read(path).map_err(|error| EndpointError::File {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_a_pod_the_missing_variable_is_named() {
        let error = Endpoint::in_cluster(|_| None, Path::new("/nowhere")).unwrap_err();
        assert!(
            error.to_string().contains("KUBERNETES_SERVICE_HOST"),
            "{error}"
        );
        let set = |name: &str| {
            Some(
                if name.ends_with("HOST") {
                    "fd00::1"
                } else {
                    "443"
                }
                .to_owned(),
            )
        };
        let error = Endpoint::in_cluster(set, Path::new("/nowhere")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/token"), "{error}");
    }
}
