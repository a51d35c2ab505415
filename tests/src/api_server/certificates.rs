//! Certificates of one server and its clients, by `openssl`.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// A certificate authority in a directory: `ca.crt`, `ca.key`, and a pair for each identity.
#[derive(Debug)]
pub(super) struct Authority {
    directory: PathBuf,
}

/// Whom a certificate is for.
#[derive(Debug)]
pub(super) enum Identity<'a> {
    /// The API server on this address.
    Server(Ipv4Addr),
    /// A client: common name and organizations, which Kubernetes reads as user and groups.
    User {
        name: &'a str,
        groups: &'a [&'a str],
    },
}

impl Authority {
    pub(super) fn create(directory: &Path) -> Result<Self> {
        let authority = Self {
            directory: directory.into(),
        };
        let extensions = "basicConstraints = critical, CA:true\n\
            keyUsage = critical, keyCertSign, cRLSign\n\
            subjectKeyIdentifier = hash\n";
        authority.request("ca", "CN = e2e authority\n", extensions, &[])?;
        Ok(authority)
    }

    /// The authority's own certificate.
    pub(super) fn certificate(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// The server's certificate and key, without `.crt` and `.key`.
    pub(super) fn server_certificate(&self) -> PathBuf {
        self.directory.join("server")
    }

    /// Makes a certificate (`.crt`) and a key (`.key`, PKCS #8) and returns their common path
    /// without those.
    pub(super) fn issue(&self, identity: &Identity<'_>) -> Result<PathBuf> {
        let mut extensions = "basicConstraints = critical, CA:false\n\
            keyUsage = critical, digitalSignature\n\
            subjectKeyIdentifier = hash\n\
            authorityKeyIdentifier = keyid\n"
            .to_owned();
        let (stem, mut subject) = match identity {
            Identity::Server(address) => {
                writeln!(extensions, "extendedKeyUsage = serverAuth")?;
                writeln!(
                    extensions,
                    "subjectAltName = IP:{address}, DNS:localhost, DNS:kubernetes.default.svc"
                )?;
                ("server".to_owned(), "CN = api-server\n".to_owned())
            }
            Identity::User { name, groups } => {
                let words = std::iter::once(name).chain(groups.iter());
                for word in words {
                    ensure!(
                        !word.is_empty() && !word.contains(['\n', '$', '\\', '#', '/']),
                        "{word:?} cannot be in a certificate's subject"
                    );
                }
                writeln!(extensions, "extendedKeyUsage = clientAuth")?;
                let mut subject = String::new();
                for (index, group) in groups.iter().enumerate() {
                    writeln!(subject, "{index}.O = {group}")?;
                }
                (format!("user-{name}"), subject)
            }
        };
        if let Identity::User { name, .. } = identity {
            writeln!(subject, "CN = {name}")?;
        }
        let (certificate, key) = (self.certificate(), self.directory.join("ca.key"));
        self.request(
            &stem,
            &subject,
            &extensions,
            &["-CA".as_ref(), &certificate, "-CAkey".as_ref(), &key],
        )?;
        Ok(self.directory.join(stem))
    }

    fn request(
        &self,
        stem: &str,
        subject: &str,
        extensions: &str,
        signed_by: &[&Path],
    ) -> Result<()> {
        let path = |extension: &str| self.directory.join(format!("{stem}.{extension}"));
        let config = format!(
            "[req]\nprompt = no\nutf8 = yes\ndistinguished_name = subject\n\
             x509_extensions = extensions\n[subject]\n{subject}[extensions]\n{extensions}"
        );
        fs::write(path("conf"), config)?;
        let output = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"])
            .args(["-pkeyopt", "ec_paramgen_curve:P-256"])
            .arg("-config")
            .arg(path("conf"))
            .arg("-keyout")
            .arg(path("key"))
            .arg("-out")
            .arg(path("crt"))
            .args(signed_by)
            .stdin(Stdio::null())
            .output()
            .context("run openssl")?;
        if !output.status.success() {
            bail!(
                "openssl makes no certificate of {stem}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }
}
