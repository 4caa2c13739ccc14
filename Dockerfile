# The service in an image: `docker build -t tenuto .`; what it needs beside it is in compose.yaml.
FROM python:3.12-slim

# Where the CPU build of torch comes from: the general index has the one for CUDA alone (x86-64), gigabytes
# that a machine without a GPU has no use for.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# A volume takes its owner from the folder that it is mounted over for the first time.
RUN useradd --create-home --uid 10001 tenuto \
 && install -d -o tenuto -g tenuto -m 0700 /data /keys /models

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY engine engine
COPY serialization serialization
COPY sessions sessions
COPY cli cli
RUN PIP_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --no-deps "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir -c constraints.txt '.[serve]'

USER tenuto
WORKDIR /home/tenuto
ENV TENUTO_STORE=/data TENUTO_KEYS=/keys TENUTO_MODELS=/models
VOLUME ["/data", "/keys", "/models"]
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["tenuto"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
