//! What the standard variables say. Those that are not read here are read by the SDK (docs/operations.md lists all).

use std::{path::PathBuf, time::Duration};

use http::Uri;

use crate::sampler::EnvSampler;

/// The default of the specification, as of the SDK.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Where spans go, and how.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) protocol: Protocol,
    /// For gRPC; over HTTP a path may have to be added to it, which the exporter does.
    pub(crate) endpoint: Uri,
    /// What one export may take, tries again included.
    pub(crate) timeout: Duration,
    /// A file of the authorities that vouch for the collector, in place of the machine's.
    pub(crate) authorities: Option<PathBuf>,
    /// Whether `traceparent` is read and written.
    pub(crate) propagates: bool,
    /// Which traces are exported.
    pub(crate) sampler: EnvSampler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Grpc,
}

/// A variable has a value that cannot be used. The text does not quote it: some hold secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} {reason}")]
pub struct BadSetting {
    pub(crate) variable: &'static str,
    pub(crate) reason: &'static str,
}

// === impl Settings ===

impl Settings {
    /// Nothing where spans are not to be exported.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, BadSetting> {
        // An empty value is none (OpenTelemetry, Environment Variable Specification).
        let get = |name: &'static str| {
            let value = variable(name)?;
            let value = value.trim();
            (!value.is_empty()).then(|| value.to_owned())
        };
        // What is said of traces goes before what is said of every signal.
        let either = |one, all| get(one).map(|value| (one, value)).or_else(|| get(all).map(|value| (all, value)));
        let bad = |variable, reason| BadSetting { variable, reason };

        if get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match get("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(_) => return Err(bad("OTEL_TRACES_EXPORTER", "is neither otlp nor none")),
        }
        let endpoint = either("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT");
        let Some((variable, endpoint)) = endpoint else { return Ok(None) };
        let not_a_url = bad(variable, "is not a URL such as http://collector:4318");
        let endpoint: Uri = endpoint.parse().map_err(|_| not_a_url)?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) || endpoint.host().is_none() {
            return Err(not_a_url);
        }
        let protocol = match either("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") {
            None => Protocol::Http,
            Some((variable, value)) => match value.as_str() {
                "http/protobuf" => Protocol::Http,
                "grpc" => Protocol::Grpc,
                _ => return Err(bad(variable, "is neither http/protobuf nor grpc")),
            },
        };
        let timeout = match either("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT") {
            None => TIMEOUT,
            Some((variable, value)) => value
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| bad(variable, "is not a number of milliseconds"))?,
        };
        if let Some((variable, value)) =
            either("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")
            && value != "none"
        {
            return Err(bad(variable, "is not none: nothing is compressed"));
        }
        let authorities = either("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE");
        let sampler = get("OTEL_TRACES_SAMPLER");
        let sampler = sampler.as_deref().unwrap_or("parentbased_always_on");
        let root = sampler.strip_prefix("parentbased_");
        let ratio = match root.unwrap_or(sampler) {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => {
                let ratio = get("OTEL_TRACES_SAMPLER_ARG").map_or(Ok(1.0), |ratio| ratio.parse::<f64>()).ok();
                let is_ratio = |ratio: &f64| (0.0..=1.0).contains(ratio);
                ratio.filter(is_ratio).ok_or(bad("OTEL_TRACES_SAMPLER_ARG", "is not a number from 0 to 1"))?
            }
            _ => return Err(bad("OTEL_TRACES_SAMPLER", "is none of those that docs/operations.md lists")),
        };
        let sampler = EnvSampler { ratio, is_parent_based: root.is_some() };
        // Baggage, the other default, is read by nobody here.
        let propagators = get("OTEL_PROPAGATORS").unwrap_or_else(|| "tracecontext".to_owned());
        Ok(Some(Self {
            protocol,
            endpoint,
            timeout,
            authorities: authorities.map(|(_, path)| path.into()),
            sampler,
            propagates: propagators.split(',').any(|name| name.trim() == "tracecontext"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, BadSetting> {
        Settings::read(|name| variables.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned()))
    }

    fn with(variable: &str, value: &str) -> Result<Option<Settings>, BadSetting> {
        read(&[ENDPOINT, (variable, value)])
    }

    #[test]
    fn an_endpoint_turns_it_on_and_its_defaults_are_those_of_the_specification() {
        assert_eq!(
            read(&[ENDPOINT]),
            Ok(Some(Settings {
                protocol: Protocol::Http,
                endpoint: "http://collector:4318".parse().unwrap(),
                timeout: Duration::from_secs(10),
                authorities: None,
                propagates: true,
                sampler: EnvSampler { ratio: 1.0, is_parent_based: true },
            }))
        );
    }

    #[test]
    fn it_is_off_without_an_endpoint_and_where_it_is_said_to_be_off() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[(ENDPOINT.0, " ")]), Ok(None));
        assert_eq!(read(&[("OTEL_TRACES_EXPORTER", "otlp")]), Ok(None));
        assert_eq!(with("OTEL_SDK_DISABLED", "True"), Ok(None));
        assert_eq!(with("OTEL_TRACES_EXPORTER", "none"), Ok(None));
        assert!(with("OTEL_SDK_DISABLED", "false").unwrap().is_some());
    }

    #[test]
    fn what_is_said_of_traces_goes_first() {
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
        assert_eq!(settings.authorities, Some("/b".into()));
    }

    #[test]
    fn what_cannot_be_used_is_named_and_not_quoted() {
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
            let bad = with(variable, value).unwrap_err();
            assert_eq!(bad.variable, variable, "{value}");
            assert!(!bad.to_string().contains(value), "{bad}");
        }
        let sampled =
            |ratio| read(&[ENDPOINT, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", ratio)]);
        let sampler = sampled("0.25").unwrap().unwrap().sampler;
        assert_eq!(sampler, EnvSampler { ratio: 0.25, is_parent_based: false });
        assert_eq!(sampled("1.5").unwrap_err().variable, "OTEL_TRACES_SAMPLER_ARG");
    }

    #[test]
    fn trace_context_is_read_unless_another_propagator_is_named_alone() {
        let propagates = |value| with("OTEL_PROPAGATORS", value).unwrap().unwrap().propagates;
        assert!(propagates("") && propagates("baggage, tracecontext"));
        assert!(!propagates("none") && !propagates("b3"));
    }
}
