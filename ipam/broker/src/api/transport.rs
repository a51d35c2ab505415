//! HTTP/1.1 over TLS to the API server, with time limits and a token that is read anew.
//!
//! Idle, one connection is open, that of the watch; each other request finds one in the pool or
//! makes one.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, AUTHORIZATION, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube_core::Status;
use rustls::{ClientConfig, RootCertStore};
use tokio::time::{Instant, timeout};

use super::endpoint::{Endpoint, read};

/// The longest time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time until the head of an answer is there.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time between two pieces of an answer.
pub(super) const PIECE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a token's file is read: the kubelet replaces it well before the token ends.
const TOKEN_INTERVAL: Duration = Duration::from_secs(60);
/// How long a connection without a request stays open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Of an answer that is not a list.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// Why a request brought no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The server did not answer. Whether it did what was asked is not known.
    #[error("{attempt}: the Kubernetes API at {server} does not answer: {why}")]
    Unreachable {
        /// What was attempted, on which object.
        attempt: String,
        server: String,
        why: String,
    },
    #[error("{attempt}: the Kubernetes API answered {code}: {message}{}", remedy(*.code))]
    Refused {
        /// What was attempted, on which object.
        attempt: String,
        code: u16,
        /// `reason` of the status document.
        reason: String,
        /// `message` of the status document.
        message: String,
    },
    /// The answer is not what it should be.
    #[error("{attempt}: the Kubernetes API's answer is malformed: {why}")]
    Malformed {
        /// What was attempted, on which object.
        attempt: String,
        why: String,
    },
    #[error(transparent)]
    Credentials(#[from] super::endpoint::EndpointError),
}

fn remedy(code: u16) -> &'static str {
    match code {
        401 => "; is the service account's token mounted and not over?",
        403 => "; apply the Role, ClusterRole and bindings of the manifests again",
        404 => "; apply the custom resource definitions of the manifests, and make the namespace",
        _ => "",
    }
}

impl ApiError {
    /// Whether the request may have been done all the same.
    #[must_use]
    pub fn is_uncertain(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Malformed { .. } => true,
            Self::Refused { code, .. } => *code >= 500,
            Self::Credentials(_) => false,
        }
    }

    /// The HTTP status and reason, if the server refused.
    #[must_use]
    pub fn refusal(&self) -> Option<(u16, &str)> {
        match self {
            Self::Refused { code, reason, .. } => Some((*code, reason)),
            _ => None,
        }
    }
}

/// The program's processor lacks what TLS needs here.
#[derive(Debug, thiserror::Error)]
#[error(
    "this processor lacks {0}, which this program's TLS needs; give a virtual machine the host's processor \
     (-cpu host), or run the node with a store of type \"file\""
)]
pub struct Processor(String);

impl Processor {
    /// Checks what the cryptography's code needs, which else ends the program where it is used first.
    pub fn check() -> Result<(), Self> {
        let missing: Vec<&str> = features()
            .into_iter()
            .filter_map(|(name, there)| (!there).then_some(name))
            .collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(Self(missing.join(", "))),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<(&'static str, bool)> {
    vec![
        ("aes", is_x86_feature_detected!("aes")),
        ("pclmulqdq", is_x86_feature_detected!("pclmulqdq")),
        ("ssse3", is_x86_feature_detected!("ssse3")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("bmi1", is_x86_feature_detected!("bmi1")),
        ("bmi2", is_x86_feature_detected!("bmi2")),
        ("adx", is_x86_feature_detected!("adx")),
    ]
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected;
    vec![
        ("neon", is_aarch64_feature_detected!("neon")),
        ("aes", is_aarch64_feature_detected!("aes")),
        ("pmull", is_aarch64_feature_detected!("pmull")),
        ("sha2", is_aarch64_feature_detected!("sha2")),
    ]
}

/// Requests by method and status; status 0 for those without an answer.
pub type Requests = BTreeMap<(String, u16), u64>;

/// Sends requests and counts them. Clones share connections and counts.
#[derive(Clone)]
pub struct Transport {
    client: HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    endpoint: Rc<Endpoint>,
    token: Rc<RefCell<Option<(HeaderValue, Instant)>>>,
    requests: Rc<RefCell<Requests>>,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl Transport {
    /// To an endpoint. Nothing is asked yet.
    ///
    /// # Errors
    /// A certificate or key cannot be used.
    pub fn new(endpoint: Endpoint) -> Result<Self, rustls::Error> {
        let mut authorities = RootCertStore::empty();
        for certificate in &endpoint.authorities {
            authorities.add(certificate.clone())?;
        }
        let provider = Arc::new(rustls_graviola::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(authorities);
        let config = match &endpoint.certificate {
            Some((chain, key)) => config.with_client_auth_cert(chain.clone(), key.clone_key())?,
            None => config.with_no_client_auth(),
        };
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        // A watch is silent for minutes; a peer that is gone without a word is noticed all the same.
        http.set_keepalive(Some(Duration::from_secs(30)));
        http.set_keepalive_interval(Some(Duration::from_secs(10)));
        http.set_keepalive_retries(Some(3));
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = HttpClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(1)
            .build(https);
        Ok(Self {
            client,
            endpoint: Rc::new(endpoint),
            token: Rc::default(),
            requests: Rc::default(),
        })
    }

    /// The namespace that the endpoint names.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.endpoint.namespace.as_deref()
    }

    #[must_use]
    pub fn requests(&self) -> Requests {
        self.requests.borrow().clone()
    }

    fn count(&self, method: &Method, code: u16) {
        let mut requests = self.requests.borrow_mut();
        *requests.entry((method.to_string(), code)).or_default() += 1;
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, ApiError> {
        let Some(path) = &self.endpoint.token else {
            return Ok(None);
        };
        if let Some((value, read)) = &*self.token.borrow()
            && read.elapsed() < TOKEN_INTERVAL
        {
            return Ok(Some(value.clone()));
        }
        let text = read(path)?;
        let value = std::str::from_utf8(&text)
            .ok()
            .and_then(|text| bearer(text.trim()));
        *self.token.borrow_mut() = value.clone().map(|value| (value, Instant::now()));
        Ok(value)
    }

    /// Sends a request and waits for the head of the answer. One that says no is an error.
    ///
    /// # Errors
    /// [`ApiError`]; `attempt` is what it says was attempted.
    pub async fn send(
        &self,
        attempt: &dyn std::fmt::Display,
        request: Request<Vec<u8>>,
    ) -> Result<ApiAnswer, ApiError> {
        let unreachable = |why: String| ApiError::Unreachable {
            attempt: attempt.to_string(),
            server: self.endpoint.base.to_string(),
            why,
        };
        let (mut head, body) = request.into_parts();
        let method = head.method.clone();
        head.uri = absolute(&self.endpoint.base, &head.uri)
            .map_err(|error| unreachable(error.to_string()))?;
        head.headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("rdma-ipam-broker/", env!("CARGO_PKG_VERSION"))),
        );
        head.headers
            .entry(ACCEPT)
            .or_insert(HeaderValue::from_static("application/json"));
        if let Some(token) = self.authorization()? {
            head.headers.insert(AUTHORIZATION, token);
        }
        let request = Request::from_parts(head, Full::new(Bytes::from(body)));
        let sent = timeout(ANSWER_TIMEOUT, self.client.request(request)).await;
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                self.count(&method, 0);
                return Err(unreachable(causes(&error)));
            }
            Err(_) => {
                self.count(&method, 0);
                return Err(unreachable(format!("no answer within {ANSWER_TIMEOUT:?}")));
            }
        };
        self.count(&method, response.status().as_u16());
        let answer = ApiAnswer {
            attempt: attempt.to_string(),
            server: self.endpoint.base.to_string(),
            response,
        };
        if answer.response.status().is_success() {
            return Ok(answer);
        }
        if answer.response.status() == StatusCode::UNAUTHORIZED {
            self.token.borrow_mut().take();
        }
        Err(answer.refusal().await)
    }
}

fn bearer(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The path and query of `uri` below `base`.
fn absolute(base: &Uri, uri: &Uri) -> Result<Uri, http::Error> {
    let prefix = base.path().trim_end_matches('/');
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut builder = Uri::builder().path_and_query(format!("{prefix}{path}"));
    if let Some(scheme) = base.scheme() {
        builder = builder.scheme(scheme.clone());
    }
    if let Some(authority) = base.authority() {
        builder = builder.authority(authority.clone());
    }
    builder.build()
}

/// An error and its causes: hyper's own text does not name them.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// An answer of which the body is still to come.
#[derive(Debug)]
pub struct ApiAnswer {
    attempt: String,
    server: String,
    response: Response<Incoming>,
}

impl ApiAnswer {
    /// The next piece of the body; `None` at its end. Waits at most `limit`.
    ///
    /// # Errors
    /// [`ApiError::Unreachable`]: it was cut short, or late.
    pub async fn piece(&mut self, limit: Duration) -> Result<Option<Bytes>, ApiError> {
        loop {
            let why = match timeout(limit, self.response.body_mut().frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    // Trailers.
                    Err(_) => continue,
                },
                Ok(Some(Err(error))) => causes(&error),
                Err(_) => format!("nothing more within {limit:?}"),
            };
            return Err(ApiError::Unreachable {
                attempt: self.attempt.clone(),
                server: self.server.clone(),
                why,
            });
        }
    }

    /// The error that its body is malformed.
    pub fn malformed(&self, why: impl ToString) -> ApiError {
        ApiError::Malformed {
            attempt: self.attempt.clone(),
            why: why.to_string(),
        }
    }

    /// The document that the body is.
    ///
    /// # Errors
    /// [`ApiError`]: cut short, or no such document.
    pub async fn document<T: serde::de::DeserializeOwned>(mut self) -> Result<T, ApiError> {
        let text = self.text().await?;
        serde_json::from_slice(&text).map_err(|error| self.malformed(error))
    }

    async fn text(&mut self) -> Result<Vec<u8>, ApiError> {
        let mut text = Vec::new();
        while let Some(piece) = self.piece(PIECE_TIMEOUT).await? {
            text.extend_from_slice(&piece);
            if text.len() > MAX_ANSWER_BYTES {
                return Err(self.malformed(format!("longer than {MAX_ANSWER_BYTES} bytes")));
            }
        }
        Ok(text)
    }

    async fn refusal(mut self) -> ApiError {
        let code = self.response.status().as_u16();
        let text = self.text().await.unwrap_or_default();
        let status: Status = serde_json::from_slice(&text).unwrap_or_default();
        let message = match status.message.is_empty() {
            // Not the API server itself: a proxy before it.
            true => String::from_utf8_lossy(text.get(..text.len().min(200)).unwrap_or_default())
                .trim()
                .to_owned(),
            false => status.message,
        };
        ApiError::Refused {
            attempt: self.attempt,
            code,
            reason: status.reason,
            message,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_path_comes_before_the_apis() {
        for (base, path, whole) in [
            (
                "https://10.0.0.1:6443",
                "/api/v1/nodes/n1",
                "https://10.0.0.1:6443/api/v1/nodes/n1",
            ),
            (
                "https://h/k8s/c-1/",
                "/apis/x?a=b",
                "https://h/k8s/c-1/apis/x?a=b",
            ),
        ] {
            let uri = absolute(&base.parse().unwrap(), &path.parse().unwrap()).unwrap();
            assert_eq!(uri.to_string(), whole);
        }
    }

    #[test]
    fn what_may_have_been_done_is_told_from_what_was_refused() {
        let refused = |code| ApiError::Refused {
            attempt: "create".into(),
            code,
            reason: String::new(),
            message: String::new(),
        };
        assert!(!refused(409).is_uncertain() && !refused(403).is_uncertain());
        assert!(refused(500).is_uncertain() && refused(504).is_uncertain());
    }
}
