//! Reads the standard `OTEL_*` variables, except those that the SDK reads itself (docs/operations.md lists all).

use std::{path::PathBuf, time::Duration};

use http::Uri;

use crate::sampler::EnvSampler;

/// The default timeout of OpenTelemetry's specification and SDK.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// How spans are exported.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) protocol: Protocol,
    /// The URL of the collector, used only for gRPC. For HTTP, the exporter of the SDK reads the variables itself, and
    /// adds the path if needed.
    pub(crate) endpoint: Uri,
    /// Timeout of one export, including retries.
    pub(crate) timeout: Duration,
    /// A file with root certificates for the collector, instead of those of the machine.
    pub(crate) root_certificates: Option<PathBuf>,
    /// Whether `traceparent` is read and written.
    pub(crate) propagates_context: bool,
    /// Which traces are exported.
    pub(crate) sampler: EnvSampler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Grpc,
}

/// A variable has an invalid value. The text does not quote the value, which can be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} {reason}")]
pub struct InvalidSetting {
    pub(crate) variable: &'static str,
    pub(crate) reason: &'static str,
}

/// The environment variables: a function from the name of a variable to its value.
struct Variables<F>(F);

// === impl Settings ===

impl Settings {
    /// Reads the settings from the environment variables. `None` if spans are not exported.
    pub(crate) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, InvalidSetting> {
        let variables = Variables(variable);
        if variables.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match variables.get("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(_) => return Err(invalid("OTEL_TRACES_EXPORTER", "is neither otlp nor none")),
        }
        let Some(endpoint) = variables.endpoint()? else { return Ok(None) };
        let protocol = variables.protocol()?;
        let timeout = variables.timeout()?;
        variables.check_compression()?;
        let root_certificates =
            variables.first_set("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE");
        let sampler = variables.sampler()?;
        // OpenTelemetry's default is `tracecontext` and `baggage`. `baggage` is not used here.
        let propagators = variables.get("OTEL_PROPAGATORS").unwrap_or_else(|| "tracecontext".to_owned());
        Ok(Some(Self {
            protocol,
            endpoint,
            timeout,
            root_certificates: root_certificates.map(|(_, path)| path.into()),
            propagates_context: propagators.split(',').any(|name| name.trim() == "tracecontext"),
            sampler,
        }))
    }
}

// === impl Variables ===

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// The value of a variable. `None` if the variable is not set or empty, which means the same (OpenTelemetry,
    /// Environment Variable Specification).
    fn get(&self, name: &'static str) -> Option<String> {
        let value = (self.0)(name)?;
        let value = value.trim();
        (!value.is_empty()).then(|| value.to_owned())
    }

    /// The name and the value of the variable for traces or, if it is not set, of the variable for all signals.
    fn first_set(&self, for_traces: &'static str, for_all: &'static str) -> Option<(&'static str, String)> {
        let name_and_value = |name| self.get(name).map(|value| (name, value));
        name_and_value(for_traces).or_else(|| name_and_value(for_all))
    }

    fn endpoint(&self) -> Result<Option<Uri>, InvalidSetting> {
        let endpoint = self.first_set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT");
        let Some((variable, endpoint)) = endpoint else { return Ok(None) };
        let not_a_url = invalid(variable, "is not a URL such as http://collector:4318");
        let endpoint: Uri = endpoint.parse().map_err(|_| not_a_url)?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) || endpoint.host().is_none() {
            return Err(not_a_url);
        }
        Ok(Some(endpoint))
    }

    fn protocol(&self) -> Result<Protocol, InvalidSetting> {
        let protocol = self.first_set("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL");
        let Some((variable, protocol)) = protocol else { return Ok(Protocol::Http) };
        match protocol.as_str() {
            "http/protobuf" => Ok(Protocol::Http),
            "grpc" => Ok(Protocol::Grpc),
            _ => Err(invalid(variable, "is neither http/protobuf nor grpc")),
        }
    }

    fn timeout(&self) -> Result<Duration, InvalidSetting> {
        let timeout = self.first_set("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT");
        let Some((variable, timeout)) = timeout else { return Ok(DEFAULT_TIMEOUT) };
        timeout.parse().map(Duration::from_millis).map_err(|_| invalid(variable, "is not a number of milliseconds"))
    }

    fn check_compression(&self) -> Result<(), InvalidSetting> {
        match self.first_set("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION") {
            Some((variable, value)) if value != "none" => {
                Err(invalid(variable, "must be none: compression is not supported"))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn sampler(&self) -> Result<EnvSampler, InvalidSetting> {
        let name = self.get("OTEL_TRACES_SAMPLER").unwrap_or_else(|| "parentbased_always_on".to_owned());
        let root = name.strip_prefix("parentbased_");
        let ratio = match root.unwrap_or(&name) {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => self.sampler_ratio()?,
            _ => return Err(invalid("OTEL_TRACES_SAMPLER", "is not a sampler that docs/operations.md lists")),
        };
        Ok(EnvSampler { ratio, is_parent_based: root.is_some() })
    }

    fn sampler_ratio(&self) -> Result<f64, InvalidSetting> {
        let Some(ratio) = self.get("OTEL_TRACES_SAMPLER_ARG") else { return Ok(1.0) };
        let ratio = ratio.parse::<f64>().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
        ratio.ok_or(invalid("OTEL_TRACES_SAMPLER_ARG", "is not a number from 0 to 1"))
    }
}

fn invalid(variable: &'static str, reason: &'static str) -> InvalidSetting {
    InvalidSetting { variable, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, InvalidSetting> {
        Settings::from_variables(|name| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn read_with(variable: &str, value: &str) -> Result<Option<Settings>, InvalidSetting> {
        read(&[ENDPOINT, (variable, value)])
    }

    #[test]
    fn an_endpoint_enables_export_with_the_defaults_of_the_specification() {
        assert_eq!(
            read(&[ENDPOINT]),
            Ok(Some(Settings {
                protocol: Protocol::Http,
                endpoint: "http://collector:4318".parse().unwrap(),
                timeout: Duration::from_secs(10),
                root_certificates: None,
                propagates_context: true,
                sampler: EnvSampler { ratio: 1.0, is_parent_based: true },
            }))
        );
    }

    #[test]
    fn export_is_off_without_an_endpoint_or_when_disabled() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[(ENDPOINT.0, " ")]), Ok(None));
        assert_eq!(read(&[("OTEL_TRACES_EXPORTER", "otlp")]), Ok(None));
        assert_eq!(read_with("OTEL_SDK_DISABLED", "True"), Ok(None));
        assert_eq!(read_with("OTEL_TRACES_EXPORTER", "none"), Ok(None));
        assert!(read_with("OTEL_SDK_DISABLED", "false").unwrap().is_some());
    }

    #[test]
    fn variables_for_traces_take_precedence() {
        let settings = read(&[
            ENDPOINT,
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces.example:4317"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2000"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/a"),
            ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/b"),
        ]);
        let settings = settings.unwrap().unwrap();
        assert_eq!(settings.endpoint.host(), Some("traces.example"));
        assert_eq!((settings.protocol, settings.timeout), (Protocol::Grpc, Duration::from_secs(2)));
        assert_eq!(settings.root_certificates, Some("/b".into()));
    }

    #[test]
    fn an_invalid_variable_is_named_without_its_value() {
        for (variable, value) in [
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "telemetry:4318"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://collector"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://a secret"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ] {
            let error = read_with(variable, value).unwrap_err();
            assert_eq!(error.variable, variable, "{value}");
            assert!(!error.to_string().contains(value), "{error}");
        }
        let with_ratio =
            |ratio| read(&[ENDPOINT, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", ratio)]);
        let sampler = with_ratio("0.25").unwrap().unwrap().sampler;
        assert_eq!(sampler, EnvSampler { ratio: 0.25, is_parent_based: false });
        assert_eq!(with_ratio("1.5").unwrap_err().variable, "OTEL_TRACES_SAMPLER_ARG");
    }

    #[test]
    fn trace_context_is_used_unless_only_other_propagators_are_named() {
        let propagates = |value| read_with("OTEL_PROPAGATORS", value).unwrap().unwrap().propagates_context;
        assert!(propagates("") && propagates("baggage, tracecontext"));
        assert!(!propagates("none") && !propagates("b3"));
    }
}
