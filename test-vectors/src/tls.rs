//! Certificates for servers on the loopback address. They expire in 2126; the key is no secret, and nothing but a test that
//! names [`ROOT_PEM`] trusts it.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The root that a client must trust: of nobody else's chain.
pub const ROOT_PEM: &str = include_str!("../tls/root.pem");
const SERVER_PEM: &[u8] = include_bytes!("../tls/server.pem");
const SERVER_KEY_PEM: &[u8] = include_bytes!("../tls/server.key");

/// What a server at 127.0.0.1 or `localhost` needs.
pub(crate) fn server_config() -> Arc<rustls::ServerConfig> {
    let certificate = CertificateDer::from_pem_slice(SERVER_PEM).expect("a certificate of this repository");
    let key = PrivateKeyDer::from_pem_slice(SERVER_KEY_PEM).expect("a key of this repository");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the default protocol versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("the key is that of the certificate");
    Arc::new(config)
}
