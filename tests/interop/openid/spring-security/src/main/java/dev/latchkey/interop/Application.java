package dev.latchkey.interop;

import java.util.Map;

import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.context.annotation.Bean;
import org.springframework.http.HttpMethod;
import org.springframework.security.config.Customizer;
import org.springframework.security.config.annotation.web.builders.HttpSecurity;
import org.springframework.security.core.Authentication;
import org.springframework.security.core.annotation.AuthenticationPrincipal;
import org.springframework.security.oauth2.client.OAuth2AuthorizedClient;
import org.springframework.security.oauth2.client.annotation.RegisteredOAuth2AuthorizedClient;
import org.springframework.security.oauth2.client.endpoint.OAuth2RefreshTokenGrantRequest;
import org.springframework.security.oauth2.client.endpoint.RestClientRefreshTokenTokenResponseClient;
import org.springframework.security.oauth2.client.oidc.authentication.OidcIdTokenDecoderFactory;
import org.springframework.security.oauth2.client.oidc.web.logout.OidcClientInitiatedLogoutSuccessHandler;
import org.springframework.security.oauth2.client.registration.ClientRegistrationRepository;
import org.springframework.security.oauth2.client.web.OAuth2AuthorizedClientRepository;
import org.springframework.security.oauth2.core.oidc.user.OidcUser;
import org.springframework.security.web.SecurityFilterChain;
import org.springframework.security.web.servlet.util.matcher.PathPatternRequestMatcher;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.RestController;
import org.springframework.web.client.RestClient;

/** A web application that signs in users with Spring Security. */
@SpringBootApplication
@RestController
public class Application {
    private final OAuth2AuthorizedClientRepository clients;

    Application(OAuth2AuthorizedClientRepository clients) {
        this.clients = clients;
    }

    public static void main(String[] arguments) {
        SpringApplication.run(Application.class, arguments);
    }

    @GetMapping("/")
    Map<String, Object> home(
            @AuthenticationPrincipal OidcUser user,
            @RegisteredOAuth2AuthorizedClient("latchkey") OAuth2AuthorizedClient client) {
        return session(user.getClaims(), client, user.getIdToken().getTokenValue());
    }

    /** Gets new tokens, and verifies the new ID token. */
    @GetMapping("/refresh")
    Map<String, Object> refresh(
            Authentication authentication,
            @RegisteredOAuth2AuthorizedClient("latchkey") OAuth2AuthorizedClient client,
            HttpServletRequest request,
            HttpServletResponse response) {
        var registration = client.getClientRegistration();
        var tokens = new RestClientRefreshTokenTokenResponseClient().getTokenResponse(
                new OAuth2RefreshTokenGrantRequest(registration, client.getAccessToken(), client.getRefreshToken()));
        var refreshToken = tokens.getRefreshToken() == null ? client.getRefreshToken() : tokens.getRefreshToken();
        var refreshed = new OAuth2AuthorizedClient(
                registration, client.getPrincipalName(), tokens.getAccessToken(), refreshToken);
        clients.saveAuthorizedClient(refreshed, authentication, request, response);
        var idToken = (String) tokens.getAdditionalParameters().get("id_token");
        var claims = new OidcIdTokenDecoderFactory().createDecoder(registration).decode(idToken).getClaims();
        return session(claims, refreshed, idToken);
    }

    @GetMapping("/userinfo")
    Map<String, Object> userInfo(@RegisteredOAuth2AuthorizedClient("latchkey") OAuth2AuthorizedClient client) {
        var endpoint = client.getClientRegistration().getProviderDetails().getUserInfoEndpoint().getUri();
        var claims = RestClient.create().get().uri(endpoint)
                .headers(headers -> headers.setBearerAuth(client.getAccessToken().getTokenValue()))
                .retrieve().body(Map.class);
        return Map.of("claims", claims);
    }

    @GetMapping("/signed-out")
    Map<String, Object> signedOut() {
        return Map.of("signed_out", true);
    }

    private static Map<String, Object> session(
            Map<String, Object> claims, OAuth2AuthorizedClient client, String idToken) {
        return Map.of("claims", claims, "access_token", client.getAccessToken().getTokenValue(), "id_token", idToken);
    }

    @Bean
    SecurityFilterChain security(HttpSecurity http, ClientRegistrationRepository registrations) throws Exception {
        var atProvider = new OidcClientInitiatedLogoutSuccessHandler(registrations);
        atProvider.setPostLogoutRedirectUri("{baseUrl}/signed-out");
        // A real application logs out with POST. The test opens links only.
        var signOut = PathPatternRequestMatcher.withDefaults().matcher(HttpMethod.GET, "/sign-out");
        return http
                .authorizeHttpRequests(requests -> requests
                        .requestMatchers("/signed-out").permitAll()
                        .anyRequest().authenticated())
                .oauth2Login(Customizer.withDefaults())
                .logout(logout -> logout.logoutRequestMatcher(signOut).logoutSuccessHandler(atProvider))
                .build();
    }
}
