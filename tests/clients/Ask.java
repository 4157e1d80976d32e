// Asks the gateway at args[0] with Java's own HTTP client: args[1] is the body. Prints each line of the answer.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

public class Ask {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int time = 0; time < 2; time++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(args[1]))
                .build();
            HttpResponse<java.util.stream.Stream<String>> answer =
                client.send(request, HttpResponse.BodyHandlers.ofLines());
            System.out.println(answer.statusCode());
            answer.body().forEach(System.out::println);
        }
    }
}
