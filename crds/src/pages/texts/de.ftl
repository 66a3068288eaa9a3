### The texts of the hosted pages in German. Each message is plain text with variables. An App can replace messages.
### "E‑Mail" has a hyphen at which lines do not break (U+2011).

## Every page

title-with-error = Fehler: { $title }
or = oder
back-to-login = Zurück zur Anmeldung
back-to-account = Zurück zu Ihrem Konto
save = Speichern
cancel = Abbrechen
request-id = Anfrage-ID: { $id }
language = Sprache
language-en = English
language-de = Deutsch
link-home = Weiter zu { $app }
link-terms = Nutzungsbedingungen
link-privacy = Datenschutz
link-support = Hilfe

## Fields

name-label = Name
email-label = E‑Mail-Adresse
new-email-label = Neue E‑Mail-Adresse
password-label = Passwort
new-password-label = Neues Passwort
current-password-label = Aktuelles Passwort
code-label = Code
password-hint = Mindestens { $minimum } Zeichen. Mehrere ungewöhnliche Wörter ergeben ein gutes Passwort.
password-show = Anzeigen
password-hide = Verbergen
code-hint = Groß- und Kleinschreibung, Leerzeichen und Bindestriche spielen keine Rolle.

## Log in

login-title = Anmelden
login-button = Anmelden
login-forgot = Passwort vergessen?
login-no-account = Neu hier?
login-register = Konto erstellen
login-notice-password-reset = Ihr neues Passwort gilt. Sie können sich jetzt damit anmelden.
login-notice-account-deleted = Ihr Konto ist gelöscht.
login-notice-other-account = Melden Sie sich mit dem Konto an, das Sie verwenden möchten.
login-notice-again = Bitte melden Sie sich noch einmal an, damit wir wissen, dass Sie es sind.
provider-continue = Mit { $provider } fortfahren

## Create an account

register-title = Konto erstellen
register-button = Konto erstellen
register-have-account = Sie haben schon ein Konto?
register-login = Anmelden

## Confirm the email address

confirm-notice-title = Schauen Sie in Ihr Postfach
confirm-notice-sent = Wir haben eine E‑Mail an { $email } geschickt. Öffnen Sie den Link darin, oder geben Sie hier den Code ein.
confirm-notice-account = Wenn Sie schon ein Konto haben, steht in der E‑Mail, wie Sie sich anmelden.
confirm-title = E‑Mail-Adresse bestätigen
confirm-lead = Geben Sie den Code aus unserer E‑Mail ein.
confirm-lead-link = Ein Klick, und Ihre E‑Mail-Adresse ist bestätigt.
confirm-lead-password = Bitte geben Sie auch Ihr Passwort ein, damit wir wissen, dass Sie es sind.
confirm-lead-login = Bitte melden Sie sich zuerst an. Öffnen Sie danach den Link in der E‑Mail noch einmal.
confirm-button = Bestätigen
confirm-no-mail = Keine E‑Mail da? Bitte sehen Sie im Spam-Ordner nach.
confirm-try-again = Noch einmal versuchen

## Reset the password

forgot-title = Passwort vergessen?
forgot-lead = Geben Sie Ihre E‑Mail-Adresse ein. Wir schicken Ihnen einen Code für ein neues Passwort.
forgot-button = Code senden
forgot-notice-title = Schauen Sie in Ihr Postfach
forgot-notice-sent = Wenn es für { $email } ein Konto gibt, ist eine E‑Mail mit einem Code unterwegs. Das kann eine Minute dauern.
forgot-notice-button = Code eingeben
forgot-notice-again = Andere E‑Mail-Adresse verwenden
reset-title = Neues Passwort wählen
reset-lead = Geben Sie den Code aus unserer E‑Mail und Ihr neues Passwort ein. Sie werden auf allen Geräten abgemeldet.
reset-lead-link = Sie werden auf allen Geräten abgemeldet.
reset-button = Neues Passwort speichern

## Account

account-title = Ihr Konto
account-profile = Profil
account-login = Anmeldung
account-more = Sicherheit
account-name = Name
account-email = E‑Mail-Adresse
account-email-none = Nicht angegeben
account-email-verified = Bestätigt
account-email-unverified = Noch nicht bestätigt
account-email-resend = E‑Mail noch einmal senden
account-email-pending = Die Bestätigung von { $email } steht noch aus
account-password = Passwort
account-password-set = Festgelegt
account-password-none = Nicht festgelegt
account-identities = Verknüpfte Konten
account-sessions = Geräte
account-sessions-value = Wo Sie angemeldet sind
account-activity = Aktivität
account-activity-value = Was in Ihrem Konto passiert ist
account-applications = Anwendungen
account-applications-value = Was Ihr Konto nutzen darf
account-delete = Konto löschen
account-logout = Abmelden
account-notice-name = Ihr Name ist gespeichert.
account-notice-email-sent = Wir haben eine E‑Mail an { $email } geschickt. Öffnen Sie den Link darin, um die Adresse zu bestätigen.
account-notice-email-confirmed = Ihre E‑Mail-Adresse ist bestätigt.
account-notice-password = Ihr neues Passwort ist gespeichert.
account-notice-linked = { $provider } ist verknüpft. Sie können sich ab jetzt damit anmelden.
account-notice-unlinked = { $provider } ist nicht mehr verknüpft.
account-notice-session-ended = Das Gerät ist abgemeldet.
account-notice-others-ended = Alle anderen Geräte sind abgemeldet.
account-notice-application-removed = Die Anwendung hat keinen Zugriff mehr.
reauthenticate-login = Bitte melden Sie sich noch einmal an, um fortzufahren.

password-title = Passwort ändern
password-title-new = Passwort festlegen
password-lead-required = Ihr Konto hat kein Passwort. Bitte legen Sie jetzt eines fest.
password-button = Passwort speichern

email-title = E‑Mail-Adresse ändern
email-current = Ihre E‑Mail-Adresse ist { $email }.
email-lead = Wir schicken einen Link an die neue Adresse. Sobald Sie ihn öffnen, ersetzt sie die alte.
email-button = Link senden

delete-title = Konto löschen
delete-lead = Damit löschen Sie Ihr Konto bei { $app } mit allem, was dazugehört. Das lässt sich nicht rückgängig machen.
delete-password = Geben Sie zur Bestätigung Ihr Passwort ein.
delete-button = Konto endgültig löschen

identities-title = Verknüpfte Konten
identities-lead = Mit jedem dieser Konten können Sie sich anmelden.
identities-empty = Noch ist kein Konto verknüpft.
identities-add = Weiteres Konto verknüpfen
identities-since = Verknüpft am { $date }
identities-link = { $provider } verknüpfen
identities-unlink = Trennen
identities-unlink-label = { $provider } trennen

sessions-title = Geräte
sessions-lead = Hier sind Sie angemeldet. Sie kennen ein Gerät nicht? Melden Sie es ab, und ändern Sie Ihr Passwort.
sessions-current = Dieses Gerät
sessions-used = Zuletzt am { $date }
sessions-end = Abmelden
sessions-end-label = { $device } abmelden
sessions-end-others = Alle anderen Geräte abmelden
device = { $browser } auf { $system }
device-unknown = Unbekanntes Gerät

applications-title = Anwendungen
applications-lead = Diese Anwendungen dürfen Ihr Konto nutzen.
applications-empty = Keine Anwendung darf Ihr Konto nutzen.
applications-since = Erlaubt am { $date }
applications-remove = Entfernen
applications-remove-label = { $client } entfernen

activity-title = Aktivität
activity-lead = Was zuletzt in Ihrem Konto passiert ist. Das Neueste steht oben.
activity-empty = Bisher ist nichts passiert.
activity-times = { $count }-mal
activity-registered = Konto erstellt
activity-registered-again = Jemand wollte mit Ihrer E‑Mail-Adresse noch ein Konto erstellen
activity-confirmation-requested = E‑Mail zur Bestätigung angefordert
activity-confirmed = E‑Mail-Adresse bestätigt
activity-logged-in = Angemeldet
activity-logged-out = Abgemeldet
activity-password-reset-requested = Code für ein neues Passwort angefordert
activity-password-reset = Passwort zurückgesetzt
activity-password-changed = Passwort geändert
activity-password-removed = Passwort entfernt
activity-address-change-requested = Änderung der E‑Mail-Adresse angefordert
activity-address-changed = E‑Mail-Adresse geändert
activity-renamed = Name geändert
activity-session-ended = Ein Gerät wurde abgemeldet
activity-sessions-ended = Alle anderen Geräte wurden abgemeldet
activity-refresh-late = Ein Gerät hat seine Anmeldung spät verlängert
activity-refresh-stolen = Eine Anmeldung wurde doppelt benutzt und zu Ihrem Schutz beendet
activity-identity-linked = Konto verknüpft
activity-client-authorized = Bei einer Anwendung angemeldet
activity-consent-given = Zugriff für eine Anwendung erlaubt
activity-consent-withdrawn = Zugriff für eine Anwendung entfernt
activity-identity-unlinked = Konto getrennt
activity-changed-by-administrator = Von der Verwaltung geändert
activity-login-refused = Anmeldung abgelehnt
activity-login-limited = Zu viele Versuche, sich anzumelden
activity-password-check-refused = Falsches Passwort
activity-password-reset-refused = Falscher Code für ein neues Passwort
activity-other = Anderes Ereignis

## Log out

logout-title = Abmelden?
logout-lead = Sie werden in diesem Browser von { $app } abgemeldet.
logout-button = Abmelden
logout-done-title = Sie sind abgemeldet
logout-done-lead = Bis bald!

## Access for applications

consent-title = { $client } möchte Ihr Konto nutzen
consent-account = Sie sind angemeldet als { $account }.
consent-lead = Die Anwendung erhält:
consent-host = Danach geht es bei { $host } weiter.
consent-device = Erlauben Sie das nur, wenn Sie { $client } gerade selbst auf diesem Gerät geöffnet haben.
consent-allow = Erlauben
consent-deny = Nicht erlauben
consent-switch = Anderes Konto verwenden
scope-openid = Ihre Benutzer-ID, an der sie Sie wiedererkennt
scope-profile = Ihren Namen
scope-email = Ihre E‑Mail-Adresse
scope-groups = Ihre Gruppen: zum Beispiel, in welchem Team Sie sind
scope-offline-access = Zugriff, auch wenn Sie nicht da sind, bis Sie ihn in Ihrem Konto entfernen
scope-other = { $scope }

## Back to the application

form-post-title = Einen Moment, bitte
form-post-lead = Bei { $host } geht es weiter.
form-post-button = Weiter

## Error page

error-title = Das hat nicht geklappt
error-title-not-found = Seite nicht gefunden
error-title-busy = Einen Moment, bitte
error-title-failed = Bei uns ist etwas schiefgegangen
error-start-again = Noch einmal beginnen

## Errors

error-invalid-request = Bitte prüfen Sie Ihre Angaben.
error-invalid-code = Dieser Code funktioniert nicht. Vielleicht ist er abgelaufen oder wurde schon benutzt. Bitte fordern Sie einen neuen an.
error-weak-password = Bitte wählen Sie ein anderes Passwort.
error-redirect-url-not-allowed = Die Anwendung hat Sie mit einer Adresse hierher geschickt, die wir nicht kennen. Bitte wenden Sie sich an ihren Support.
error-invalid-state = Diese Seite ist abgelaufen oder wurde in einem anderen Browser geöffnet. Bitte beginnen Sie noch einmal.
error-invalid-credentials = Die E‑Mail-Adresse oder das Passwort stimmt nicht. Bitte versuchen Sie es noch einmal.
error-wrong-password = Das Passwort stimmt nicht. Bitte versuchen Sie es noch einmal.
error-reauthentication-required = Bitte geben Sie Ihr Passwort ein, damit wir wissen, dass Sie es sind.
error-invalid-request-uri = Die Anwendung hat diese Anmeldung vor zu langer Zeit begonnen, oder sie wurde schon benutzt. Bitte beginnen Sie in der Anwendung noch einmal.
error-invalid-client = Wir kennen die Anwendung nicht, die Sie hierher geschickt hat. Bitte wenden Sie sich an ihren Support.
error-invalid-provider-token = Die Anmeldung beim anderen Dienst hat nicht geklappt. Bitte versuchen Sie es noch einmal.
error-email-not-verified = Bitte bestätigen Sie zuerst Ihre E‑Mail-Adresse. Wir haben Ihnen dafür eine E‑Mail geschickt.
error-registration-disabled = Hier können zurzeit keine neuen Konten erstellt werden.
error-user-disabled = Dieses Konto ist gesperrt. Der Support hilft Ihnen gern weiter.
error-access-denied = Die Anmeldung wurde abgebrochen, oder dieses Konto kann hier nicht verwendet werden.
error-origin-not-allowed = Das Formular kam von einer anderen Website. Deshalb haben wir es nicht angenommen. Bitte beginnen Sie noch einmal.
error-not-found = Unter dieser Adresse gibt es nichts. Vielleicht ist die Seite umgezogen.
error-provider-not-found = Diese Art der Anmeldung gibt es nicht mehr. Bitte wählen Sie eine andere.
error-method-not-allowed = So lässt sich diese Seite nicht öffnen. Bitte beginnen Sie noch einmal.
error-email-taken = Zu dieser E‑Mail-Adresse gibt es schon ein Konto. Melden Sie sich an, oder setzen Sie das Passwort zurück.
error-account-link-required = Zu dieser E‑Mail-Adresse gibt es schon ein Konto. Melden Sie sich mit Ihrem Passwort an, und verknüpfen Sie das andere Konto unter „Verknüpfte Konten“.
error-last-identity = Anders können Sie sich nicht anmelden. Bitte legen Sie zuerst ein Passwort fest, oder verknüpfen Sie ein weiteres Konto.
error-payload-too-large = Das war zu lang für uns. Bitte kürzen Sie Ihre Angaben.
error-rate-limited = Das waren viele Versuche in kurzer Zeit. Bitte versuchen Sie es später noch einmal.
error-rate-limited-minutes = Das waren viele Versuche in kurzer Zeit. Bitte versuchen Sie es in { $minutes } Min. noch einmal.
error-server-error = Das tut uns leid. Bitte versuchen Sie es noch einmal. Wenn es wieder passiert, nennen Sie uns die Anfrage-ID unten.
error-provider-error = Der andere Dienst hat nicht wie erwartet geantwortet. Bitte versuchen Sie es noch einmal, oder melden Sie sich anders an.
error-temporarily-unavailable = Wir sind gerade nicht erreichbar. Bitte versuchen Sie es in einer Minute noch einmal.

## Errors of one field

field-name-missing = Bitte geben Sie Ihren Namen ein.
field-name-invalid = Bitte verwenden Sie nur Buchstaben, Ziffern, Leerzeichen und Satzzeichen.
field-email-missing = Bitte geben Sie Ihre E‑Mail-Adresse ein.
field-email-invalid = Bitte prüfen Sie die Adresse. Sie sollte aussehen wie name@example.com.
field-email-domain-not-allowed = Adressen dieser Domain können hier nicht verwendet werden. Bitte nehmen Sie eine andere.
field-code-missing = Bitte geben Sie den Code aus der E‑Mail ein.
field-password-missing = Bitte geben Sie Ihr Passwort ein.
field-password-too-short = Bitte verwenden Sie mindestens { $minimum } Zeichen.
field-password-too-long = Bitte verwenden Sie höchstens 128 Zeichen.
field-password-guessable = Dieses Passwort ist leicht zu erraten. Bitte nehmen Sie ein längeres oder weniger gebräuchliches.
field-too-long = Das ist zu lang. Bitte kürzen Sie es.
field-invalid = Bitte prüfen Sie diese Angabe.
