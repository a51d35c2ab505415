//! Where the API is, and as whom the broker speaks to it: the service account of its pod, or a
//! kubeconfig.
//!
//! Of a kubeconfig only what a program may do without starting another one: certificates and tokens.
//! What cannot be used is refused by name.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Uri;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;

/// Where the kubelet puts the service account's files.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Why it is not known where the API is.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// There is no service account.
    #[error(
        "no Kubernetes API: {what}; run this program in a pod that has a service account's token, or \
         name a file with --kubeconfig"
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
    /// The namespace of the service account or context, if it names one.
    pub namespace: Option<String>,
    /// Whose certificates the server's may be signed by.
    pub authorities: Vec<CertificateDer<'static>>,
    /// A client certificate with its key.
    pub certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    /// What goes into the header Authorization.
    pub token: Option<Token>,
}

pub enum Token {
    /// As it stands in a kubeconfig.
    Text(String),
    /// In a file that is replaced before the token ends.
    File(PathBuf),
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Token"),
            Self::File(path) => write!(f, "Token in {}", path.display()),
        }
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
            token: Some(Token::File(token)),
        })
    }

    /// That of a kubeconfig's current context.
    ///
    /// # Errors
    /// [`EndpointError`]: it cannot be read, or asks for what this program does not do.
    pub fn of_kubeconfig(path: &Path) -> Result<Self, EndpointError> {
        let wrong = |why: String| EndpointError::File {
            path: path.to_owned(),
            why,
        };
        let text = read(path)?;
        let text = std::str::from_utf8(&text).map_err(|error| wrong(error.to_string()))?;
        let config: Kubeconfig =
            serde_saphyr::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let none = |what: &str, name: &str| wrong(format!("it has no {what} {name:?}"));
        let name = config.current_context.as_deref().unwrap_or_default();
        let context = &Named::find(&config.contexts, name)
            .ok_or_else(|| none("context", name))?
            .context;
        let cluster = &Named::find(&config.clusters, &context.cluster)
            .ok_or_else(|| none("cluster", &context.cluster))?
            .cluster;
        let nobody = User::default();
        let user = match context.user.as_deref() {
            None | Some("") => &nobody,
            Some(name) => {
                &Named::find(&config.users, name)
                    .ok_or_else(|| none("user", name))?
                    .user
            }
        };
        if let Some(key) = cluster.unsupported().or(user.unsupported()) {
            return Err(wrong(format!(
                "this program does not use {key}; make a kubeconfig with a token (kubectl create token) \
                 or a client certificate, and the cluster's certificate authority"
            )));
        }
        let directory = path.parent().unwrap_or(Path::new("."));
        let base: Uri = cluster
            .server
            .parse()
            .map_err(|_| wrong(format!("{:?} is no address of a server", cluster.server)))?;
        let plain = base.scheme_str() == Some("http");
        let secure = base.scheme_str() == Some("https");
        let local = base.host().is_some_and(is_loopback);
        // A proxy of kubectl's, for instance. Elsewhere others could read along.
        if base.host().is_none() || !(secure || (plain && local)) {
            return Err(wrong(format!(
                "the server is {:?}, expected https://HOST:PORT, or http:// on the loopback address",
                cluster.server
            )));
        }
        let material = |data: &Option<String>, file: &Option<PathBuf>, what: &str| {
            Material::of(directory, path, data, file, what)
        };
        let authorities = material(
            &cluster.certificate_authority_data,
            &cluster.certificate_authority,
            "certificate-authority",
        )?;
        if secure && authorities.is_none() {
            return Err(wrong(
                "the cluster names no certificate-authority, without which its server is not known"
                    .to_owned(),
            ));
        }
        let chain = material(
            &user.client_certificate_data,
            &user.client_certificate,
            "client-certificate",
        )?;
        let key = material(&user.client_key_data, &user.client_key, "client-key")?;
        let certificate = match (chain, key) {
            (Some(chain), Some(key)) => Some((chain.certificates()?, key.private_key()?)),
            (None, None) => None,
            _ => {
                return Err(wrong(
                    "a client certificate needs its client-key".to_owned(),
                ));
            }
        };
        let token = match (&user.token, &user.token_file) {
            (_, Some(file)) => Some(Token::File(directory.join(file))),
            (Some(text), None) => Some(Token::Text(text.clone())),
            (None, None) => None,
        };
        Ok(Self {
            base,
            namespace: context.namespace.clone(),
            authorities: match authorities {
                Some(authorities) => authorities.certificates()?,
                None => Vec::new(),
            },
            certificate,
            token,
        })
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// PEM text and where it is from.
struct Material {
    path: PathBuf,
    text: Vec<u8>,
}

impl Material {
    fn of(
        directory: &Path,
        config: &Path,
        data: &Option<String>,
        file: &Option<PathBuf>,
        what: &str,
    ) -> Result<Option<Self>, EndpointError> {
        if let Some(data) = data {
            let text =
                BASE64_STANDARD
                    .decode(data.trim())
                    .map_err(|error| EndpointError::File {
                        path: config.to_owned(),
                        why: format!("{what}-data is no base64: {error}"),
                    })?;
            let path = config.to_owned();
            return Ok(Some(Self { path, text }));
        }
        let Some(file) = file else { return Ok(None) };
        let path = directory.join(file);
        let text = read(&path)?;
        Ok(Some(Self { path, text }))
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, EndpointError> {
        certificates(&self.path, &self.text)
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, EndpointError> {
        PrivateKeyDer::from_pem_slice(&self.text).map_err(|error| EndpointError::File {
            path: self.path.clone(),
            why: format!("it has no private key: {error}"),
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

/// What of a kubeconfig is read
/// (<https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/>).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    #[serde(default)]
    current_context: Option<String>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

trait Named: Sized {
    fn name(&self) -> &str;

    fn find<'n>(all: &'n [Self], name: &str) -> Option<&'n Self> {
        all.iter().find(|one| one.name() == name)
    }
}

macro_rules! named {
    ($named:ident, $field:ident: $kind:ident) => {
        #[derive(Deserialize)]
        struct $named {
            name: String,
            $field: $kind,
        }

        impl Named for $named {
            fn name(&self) -> &str {
                &self.name
            }
        }
    };
}

named!(NamedCluster, cluster: Cluster);
named!(NamedContext, context: Context);
named!(NamedUser, user: User);

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    #[serde(default)]
    certificate_authority: Option<PathBuf>,
    #[serde(default)]
    certificate_authority_data: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: Option<bool>,
    #[serde(default)]
    tls_server_name: Option<String>,
    #[serde(default)]
    proxy_url: Option<String>,
}

impl Cluster {
    fn unsupported(&self) -> Option<&'static str> {
        if self.insecure_skip_tls_verify == Some(true) {
            return Some("insecure-skip-tls-verify");
        }
        let name = self.tls_server_name.as_ref().map(|_| "tls-server-name");
        name.or(self.proxy_url.as_ref().map(|_| "proxy-url"))
    }
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    namespace: Option<String>,
}

#[derive(Default, Deserialize)]
struct User {
    #[serde(default, rename = "client-certificate")]
    client_certificate: Option<PathBuf>,
    #[serde(default, rename = "client-certificate-data")]
    client_certificate_data: Option<String>,
    #[serde(default, rename = "client-key")]
    client_key: Option<PathBuf>,
    #[serde(default, rename = "client-key-data")]
    client_key_data: Option<String>,
    #[serde(default)]
    token: Option<String>,
    #[serde(default, rename = "tokenFile")]
    token_file: Option<PathBuf>,
    #[serde(default)]
    username: Option<serde_json::Value>,
    #[serde(default)]
    exec: Option<serde_json::Value>,
    #[serde(default, rename = "auth-provider")]
    auth_provider: Option<serde_json::Value>,
    #[serde(default, rename = "as")]
    impersonated: Option<serde_json::Value>,
}

impl User {
    fn unsupported(&self) -> Option<&'static str> {
        [
            ("username", &self.username),
            ("exec", &self.exec),
            ("auth-provider", &self.auth_provider),
            ("as", &self.impersonated),
        ]
        .into_iter()
        .find_map(|(key, value)| value.as_ref().map(|_| key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn config(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n\
             - {{name: other, context: {{cluster: x}}}}\n\
             - {{name: c, context: {{cluster: k, user: u, namespace: rdma}}}}\n\
             clusters:\n- {{name: k, cluster: {cluster}}}\nusers:\n- {{name: u, user: {user}}}\n"
        )
    }

    #[test]
    fn a_proxy_on_the_loopback_address_is_spoken_to_without_tls() {
        let (_dir, path) = write(&config(
            "{server: 'http://127.0.0.1:8001'}",
            "{token: secret}",
        ));
        let endpoint = Endpoint::of_kubeconfig(&path).unwrap();
        assert_eq!(endpoint.base.port_u16(), Some(8001));
        assert_eq!(endpoint.namespace.as_deref(), Some("rdma"));
        assert!(matches!(&endpoint.token, Some(Token::Text(text)) if text == "secret"));
        assert!(!format!("{endpoint:?} {:?}", endpoint.token).contains("secret"));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let server = "server: 'https://10.0.0.1:6443'";
        for (cluster, user, named) in [
            ("{server: 'http://10.0.0.1:8001'}", "{}", "loopback"),
            ("{server: '127.0.0.1:8001'}", "{}", "https://"),
            (&*format!("{{{server}}}"), "{}", "certificate-authority"),
            (
                &*format!("{{{server}, insecure-skip-tls-verify: true}}"),
                "{}",
                "insecure-skip-tls-verify",
            ),
            (&*format!("{{{server}, proxy-url: x}}"), "{}", "proxy-url"),
            (
                "{server: 'http://[::1]:1'}",
                "{exec: {command: aws}}",
                "exec",
            ),
            (
                "{server: 'http://[::1]:1'}",
                "{username: a, password: b}",
                "username",
            ),
            (
                "{server: 'http://[::1]:1'}",
                "{client-certificate-data: '%%'}",
                "client-certificate-data",
            ),
            (
                "{server: 'http://[::1]:1'}",
                "{client-key: nowhere}",
                "nowhere",
            ),
        ] {
            let (_dir, path) = write(&config(cluster, user));
            let error = Endpoint::of_kubeconfig(&path).unwrap_err().to_string();
            assert!(error.contains(named), "{cluster} {user}: {error}");
        }
        let (_dir, path) = write("current-context: gone\n");
        let error = Endpoint::of_kubeconfig(&path).unwrap_err().to_string();
        assert!(error.contains("gone"), "{error}");
    }

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
